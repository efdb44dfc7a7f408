"""Text from a trained model: caches of what earlier tokens left, one token at a time, and the choice of the next.

`generate.stream` is the door; `cache.py` holds the state of the two mixers, `forward.py` the decoder over it, `sampling.py` the choice.
"""
