"""Text in, packed rows out: `open_data(config)` in `loader.py` is the door.

The way of a byte: `corpus.py` reads files, `split.py` keeps some of them for evaluation, `tokenizer.py` turns bytes into ids, `packing.py`
lays documents end to end and cuts them into rows, `loader.py` serves batch number `step`, whose arrays `batch.py` names.
`counting.py` scores the same text with byte counts, as a yardstick for the model. NumPy only; nothing here touches a device.
"""
