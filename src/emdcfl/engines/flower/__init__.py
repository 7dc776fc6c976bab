"""Clients on other machines: tasks are messages of Flower. Needs the extra ``emdcfl[flower]``.

On the server, ``federation.py`` sends tasks (``messages.py``, ``parts.py``) to the nodes that ``connected.py`` has identified. On a node,
``serve.py`` answers them with what ``node.py`` keeps between messages. ``survey.py`` and ``node_survey.py`` prepare a run over nodes' own
files.
"""
