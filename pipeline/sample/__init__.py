"""The sample world: seeded tables of a made-up radio library, and its lore."""
