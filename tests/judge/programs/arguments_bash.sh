printf "[%s]" "$@"
