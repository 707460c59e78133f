"""The agent beside an engine: pulls its view, proves the engine conformant, gates on version, reports, drains."""
