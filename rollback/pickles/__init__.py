"""Pickles read opcode by opcode, executing nothing: `reader` runs the machine, the other modules are its opcodes."""
