"""The Flower app: ``server.py`` (a ``ServerApp`` that runs a config) and ``client.py`` (a ``ClientApp`` that answers tasks).

``options.py`` lists the keys of its run config, ``superlink.py`` and ``supernode.py`` start Flower's programs, closed and warm, and
``deployment/`` keeps a federation's folder, with its nodes on this machine or elsewhere.
Only here are methods and the Flower engine imported together.
"""
