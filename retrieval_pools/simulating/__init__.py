"""What settings would gain on last night's texts, said before a night pays for them."""
