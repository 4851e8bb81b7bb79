"""What a run tells about itself: metrics, timings, console lines and sampled texts."""
