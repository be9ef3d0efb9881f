# The module has no names of its own: importing it registers torch.ops.kvio.
