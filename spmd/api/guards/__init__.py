"""The state that functions read beside their arguments: found in bytecode, compared at each call.

`frame` runs the bytecode of a function over what its variables may be (`things`); `bytecode_reader` follows what it
names and makes an `access` of each chain, with the `checks` by which it is compared. Imports `core` and `job`.
"""
