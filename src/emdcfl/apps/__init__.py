"""The Flower app: ``server.py`` (a ``ServerApp`` that runs a config) and ``client.py`` (a ``ClientApp`` that answers tasks).

The only place that imports methods and the Flower engine together. ``trial/`` runs both on one machine.
"""
