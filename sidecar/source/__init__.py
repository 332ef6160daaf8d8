"""From one ``/metrics`` page to what changed since the last: scrape, parse, state of the engine, differences."""
