"""Plans and traces drawn and explained as pages and files. Computes nothing that is not in them."""
