"""Accelerated convolutions of PyG, a file for each, with its form over many relations.

- `table.py`: the table of them; `spec.py`: what each file ends with.
- `sage.py`, `gcn.py`, `gin.py`, `gine.py`, `gat.py`, `rgcn.py`, `hgt.py`: SAGEConv and GraphConv, GCNConv, GINConv,
  GINEConv, GATConv and GATv2Conv, RGCNConv, HGTConv.
"""
