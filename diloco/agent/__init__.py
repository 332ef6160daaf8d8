"""The island agent: one process per training host that talks to the controller and supervises the rank worker."""
