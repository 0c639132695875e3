"""The only room that imports deepspeed: from layers and a mesh to training steps and named optimizer state."""
