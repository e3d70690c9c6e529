"""Where shards of a dataset are computed: in turn, in this process."""
