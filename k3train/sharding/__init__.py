"""Meshes, the rules from logical axes to mesh axes, and the sharded form of the Layout. Only this room names mesh axes."""
