"""The tests; folders mirror the source tree."""
