"""What `hardkv new-plugin` starts from: each file is a plugin that works as it stands, called `my_method`."""
