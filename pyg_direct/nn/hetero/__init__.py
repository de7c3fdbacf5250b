"""Layers over many relations, joined into one.

- `hetero_conv.py`: HeteroConv and models of `to_hetero`; the convolutions of a layer called together,
  and results of a layer that nothing in a recorded pass reads.
- `attention.py`: attention over the relations of a layer, added up by type.
- `projection.py`: products of the rows of sources, and scores of targets, of all relations.
- `joined_edges.py`: edges of relations one after the other, and their results.

The form of a convolution over several relations is in its own file, `conv/X.py`.
"""
