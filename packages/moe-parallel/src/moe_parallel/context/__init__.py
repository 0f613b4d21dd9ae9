"""Context parallelism: rows whose token slots are spread over ranks, and attention across them."""
