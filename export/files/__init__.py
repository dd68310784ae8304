"""Files of any length, or tables: in shards that appear whole or not at all, so that a run which
was killed goes on."""
