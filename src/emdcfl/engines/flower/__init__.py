"""Clients on other machines: the same tasks as messages of Flower. Needs the extra ``emdcfl[flower]``.

May import: client, tasks, federation, params, schema, keys, privacy, data; never a method.
"""
