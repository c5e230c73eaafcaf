"""Scripts as people write them, each run twice in one namespace, as cells of a notebook are, beside one device.

check: a script on virtual ranks and on one device: results, programs, live tensors, times.
scripts/: the programs; what they want compared is in their global `results`.
"""
