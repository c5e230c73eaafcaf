"""What travels between ranks: groups, flat buffers and their dtypes, and one rank's part of an exchange.

Imports `core` and `job`.
"""
