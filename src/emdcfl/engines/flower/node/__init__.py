"""A node's side: ``serve.py`` answers messages as ``policy.py`` allows, with what ``home.py`` keeps between them in the node's folder.

``data.py`` and ``survey.py`` read the site's files, ``releases.py`` limits what all runs together may learn, ``log.py`` tells the owner.
"""
