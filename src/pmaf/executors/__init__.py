"""What runs at the end of a recipe: solves that are planned once for a signature."""
