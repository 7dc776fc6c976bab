"""The Flower app: ``server.py`` (a ``ServerApp`` that runs a config) and ``client.py`` (a ``ClientApp`` that answers tasks).

``options.py`` lists the keys of its run config, and ``trial/`` runs a whole
federation on one machine. Only here are methods and the Flower engine imported together.
"""
