"""Several hosts on one machine, and what runs between them."""
