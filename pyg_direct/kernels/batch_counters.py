"""State of one batch through its hops: int64 words in the memory of the kernels' device.

The host writes the first `HEADER` words and the seeds to an inbox, which kernels read in place. After the batch it
finds all `STATE` words in an outbox.
"""

KEY = 0
NUM_SEEDS = 1
# Lowest position of a seed outside the graph; NO_POSITION if there is none.
BAD_SEED = 2
# Edges that were needed when they did not fit the plan; 0 if all fitted.
NEEDED_EDGES = 3
# In the inbox: 1 if the seeds are on the GPU already instead of after the header.
SEEDS_ON_GPU = 4
# In the state of a batch with types: items of a hop that were needed if they did not fit the plan, otherwise 0; the
# number of excluded edges; and the number of edges among the nodes of a subgraph. In its inbox: 1 if seeds have their
# own times.
NEEDED_ITEMS = 4
NUM_EXCLUDED = 5
NUM_INSIDE = 6
OWN_TIMES = 5
# In the inbox: links whose ends are the seeds, 0 for other seeds, and negatives to draw for their sources.
NUM_LINKS = 5
MORE_SOURCES = 6
HEADER = 8

MAX_HOPS = 31
# NODES + h: nodes after hop h (h = 0: the seeds). EDGES + h: edges before hop h.
NODES = HEADER
EDGES = NODES + MAX_HOPS + 1
# Stands for the hop before the first: its word of NODES is always 0, so that seeds are numbered as new nodes are.
BEFORE_SEEDS = -1
STATE = EDGES + MAX_HOPS + 1

NO_POSITION = 2**62
# A local id above all others, for a minimum to start from.
FAR = 2**31 - 1

# Purposes of a draw, so that equal (key, node, slot) of different purposes never collide.
NEIGHBOR_DRAW = 1
SHUFFLE_DRAW = 2
LABOR_DRAW = 3
# Slots that no neighbor of a row takes, for the keys of relations and of disjoint trees.
RELATION_DRAW = 2**62
TREE_DRAW = 2**62 + 1
# As these, for the keys of the sources of a type.
TYPE_DRAW = 2**62 + 6
# In place of an item, for the ends of negative links.
NEGATIVE_DRAW = 2**62 + 2
# In place of an item, for the nodes that a layer of HGT chooses.
BUDGET_DRAW = 2**62 + 3
# Slots that no step of a walk takes, for its first node, and for the destinations of random walks.
WALK_START_DRAW = 2**62 + 4
WALK_ANYWHERE_DRAW = 2**62 + 5
