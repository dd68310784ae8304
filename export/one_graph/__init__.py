"""`export --generate`: one graph that reads ids and returns sequences, with the model, the loop and
its end inside.

A `Step` (of a target) gives logits, `Rules` (of generation_config.json) change them, one of
`SEARCHES` chooses tokens, and `one_graph` puts them into a Loop. The graphs come from an export
that was compared with torch already.
"""

MODES = ("greedy", "sample", "beam")
ROLE = "generate"  # of the one graph, in the manifest
