"""TensorFlow's recorded answers (tests/goldens.json), replayed on Phalanx for 1, 2 and 4 replicas."""
