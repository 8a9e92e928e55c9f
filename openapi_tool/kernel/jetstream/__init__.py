"""Commands from delivery to settlement, doorbells, dead letters, and the records of executors, all in JetStream."""
