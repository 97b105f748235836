# shellcheck shell=sh
# /etc/profile has just set a PATH of its own; this is the one that every other way in has.
if [ -r /run/trainstation/path ]; then
    read -r PATH </run/trainstation/path
    export PATH
fi
# A person who logs in is here to work on the checkout.
case $- in *i*) [ "$PWD" != "$HOME" ] || cd /workspace || : ;; esac
