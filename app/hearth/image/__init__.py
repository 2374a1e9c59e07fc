"""The image: from a bill of materials to a container image that was checked and says so itself."""
