"""Starting ranks, and joining those that were started."""
