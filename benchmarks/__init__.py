"""What Phalanx costs next to JAX written by hand; see README.md in this folder."""
