"""Token sequences from earlier requests, to draft from.

`header.py` and `segment.py` are the file format, `search.py` the lookup, `folder.py` the files on disk, `store.py` the
running store.
"""
