"""From entity rows to knowledge and features."""
