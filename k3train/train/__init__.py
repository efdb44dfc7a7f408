"""Training: `loop.run` is the door.

`assembly.py` puts model, mesh and optimizer together; `state.py`, `loss.py` and `step.py` are the mathematics of an update; `course.py`
goes from step to step; `checkpoints.py`, `resume.py`, `metrics.py`, `evaluation.py`, `progress.py`, `signals.py` and `result.py` talk to
the outside.
"""
