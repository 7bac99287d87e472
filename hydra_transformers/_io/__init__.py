"""Files written whole, locks, threads and processes."""
