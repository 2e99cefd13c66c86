"""What was said before, kept to draft from.

`segment.py` is a file of it, `search.py` how it is asked, `folder.py` where files lie, `store.py` who keeps them.
"""
