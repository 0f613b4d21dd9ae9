"""Schedules of pipelines, each a pure function of (pp, rank, num_microbatches, num_chunks) to the list of one rank."""
