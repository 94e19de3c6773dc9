"""From a leased ticket to an inserted group: admission, sample slots, leases and what becomes of a group."""
