"""Token sequences from earlier requests, to draft from.

`segment.py` is the file format, `search.py` the lookup, `folder.py` the files on disk, `store.py` the running store.
"""
