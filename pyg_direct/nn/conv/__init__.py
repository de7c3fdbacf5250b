"""Accelerated convolutions of PyG, a file for each, with its form over many relations.

- `table.py`: the table of them; `spec.py`: the `ConvSpec` at the end of each file.
- `sage.py` (SAGEConv, GraphConv), `gcn.py` (GCNConv), `gin.py` (GINConv), `gine.py` (GINEConv), `gat.py` (GATConv,
    GATv2Conv), `rgcn.py` (RGCNConv, FastRGCNConv), `hgt.py` (HGTConv), `transformer.py` (TransformerConv), `pna.py`
    (PNAConv), `supergat.py` (SuperGATConv).
- Over known targets of `any_convolution.py`: `edge.py` (EdgeConv), `film.py` (FiLMConv), `gen.py` (GENConv),
    `nn_conv.py` (NNConv), `res_gated.py` (ResGatedGraphConv).
"""
