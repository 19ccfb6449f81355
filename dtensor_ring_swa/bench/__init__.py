"""The benchmark: ``python -m dtensor_ring_swa.bench``, alone or under torchrun.

It times ``ring_attention`` beside what else computes the same numbers (``allgather.py``,
``merge_ring.py``, ``external.py``) in one interleaved run, counts bytes, and predicts scaling without any rank
(``simulate.py``). The files in reading order: shapes, options, case, methods, ours, allgather,
merge_ring, external, timing, wire, check, run, report.
"""
