"""Commands from delivery to settlement, doorbells, dead letters and the executors' own records, all in NATS JetStream."""
