"""The protocols of the server. To add one, write a module here with `PROTOCOL`, an instance of
`protocol.Protocol`, and add the module to `PROTOCOLS` in `serving/service.py`."""
