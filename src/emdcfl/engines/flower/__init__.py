"""Clients on other machines: tasks are messages of Flower. Needs the extra ``emdcfl[flower]``.

On the server, ``federation.py`` sends tasks (``messages.py``, ``parts.py``) to the nodes that ``connected.py`` has identified.
``survey.py`` prepares a run over nodes' own files. What runs on a node is in ``node/``.
"""
