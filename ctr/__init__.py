"""Click-through-rate models on feature tables: DIN, DCNv2, gradient-boosted trees."""
