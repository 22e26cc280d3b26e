"""The node agent: one daemon a node, with the disk cache and the node's part of the chunk ring."""
