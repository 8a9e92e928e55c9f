"""State that all replicas share: records changed by compare-and-set, texts that expire; one port, several stores."""
