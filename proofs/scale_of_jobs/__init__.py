"""What a job of many gloo processes costs each of them: operations of the store, descriptors, and a failure."""
